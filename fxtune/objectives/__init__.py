"""What training minimises. An objective is one file behind the contract in base.py."""
