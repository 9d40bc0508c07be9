"""What a compression did, as a page, a text and logged figures."""
