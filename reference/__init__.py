"""The readable side: loops, eager, torch alone. It defines what is right."""
