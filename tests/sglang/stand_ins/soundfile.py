"""Nothing of it is used: no test sends sound."""
