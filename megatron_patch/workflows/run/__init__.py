"""One run: its configuration, its folder, its processes."""
