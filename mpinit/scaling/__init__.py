"""Loss scaling: the scale, and the rule that updates it."""
