"""Private parts of other libraries that fxtune uses, a module for each library (transformers has two); no other code
of fxtune uses any.

Each entry says what it is, why no public way serves, and what happens in a version of the library without it. A torch
above the tested range is refused, so entries of torch have no such version.
"""
