"""What makes the course run: the ranks of a notebook (`mesh`), what it shows and asks (`show`), and
what a run will take (`plan`). Nothing that a learner has to open to understand a technique.
"""
