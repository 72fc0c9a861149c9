"""Commands that come by other ways than HTTP."""
