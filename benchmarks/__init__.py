"""Speed comparisons to run by hand; no test depends on them."""
