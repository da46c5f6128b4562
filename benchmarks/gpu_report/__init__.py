"""What the owner of a GPU runs once, and sends as one page and one JSON file."""
