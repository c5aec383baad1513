"""Small pure transformations of jaxprs: inline calls, slice, cut in two."""

IMPORTS = ("arrays",)
