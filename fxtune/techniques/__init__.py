"""What a recipe switches on: one file or package for each technique, and the order in which they are applied."""
