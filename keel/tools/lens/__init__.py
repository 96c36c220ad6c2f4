"""The lens: a page to watch runs and to look at every token, and the same page as one file. Reads run folders only."""
