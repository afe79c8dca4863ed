"""Training objectives. Each is one file that implements the protocol in base.py."""
