"""Private parts of other libraries that fxtune uses, in a module for each library (transformers has two). All other
code of fxtune uses public parts only.

Each entry says what it uses, and why no public part serves. A torch, transformers or peft outside its tested range is
refused before any part is used (system/machine/tested_versions.py), so no entry checks whether its part exists.
"""
