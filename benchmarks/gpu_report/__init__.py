"""A report that the owner of a GPU makes once, and sends as one page and one JSON file."""
