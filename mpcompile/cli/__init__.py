"""The command line, ``python -m mpcompile``: what the package offers as functions, for a model in a file.

One module for each command; ``main`` puts them together, ``target`` finds the model.
"""
