"""Reports of a compression: as a page, as text, and as logged figures."""
