"""From a converted model to a program: its operator calls, recorded while it runs once."""
