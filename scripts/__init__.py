"""Programs for contributors. Nothing here is part of the package that users install."""
