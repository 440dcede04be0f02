"""Everything that leans on the inside of torch, one file for each thing leant on or fault worked around."""
