from .formats import fitting_format as fitting_format
