"""The exercises of the notebooks: a reader's answer is run beside the right one and beside usual
wrong ones.

A notebook's folded check cell calls `show.check_answer`. What is right, and the usual mistakes, are
in that cell for values, and for code in the modules of this package, one for each notebook.
"""

from .judge import Exercise as Exercise
