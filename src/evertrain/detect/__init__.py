"""Pure: readings become signals."""
