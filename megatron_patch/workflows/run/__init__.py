"""Runs one configuration: its flags, its folder and its processes."""
