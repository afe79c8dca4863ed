"""Private parts of other libraries that fxtune uses, a module for each library (transformers has two); no other code
of fxtune uses any.

Each entry says what it is and why no public way serves. A torch, transformers or peft outside its tested range is
refused before any part is used (system/machine/tested_versions.py), so no entry asks whether its part is there.
"""
