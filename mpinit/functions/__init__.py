"""O1: torch's functions cast their arguments, at native speed, and everything can be put back."""

from .installation import apply as apply
