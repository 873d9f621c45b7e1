"""The methods, one in each file, and what they are made of."""
