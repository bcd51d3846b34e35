from .difference import compare as compare
from .difference import difference_page as difference_page
from .difference import print_difference as print_difference
from .sides import ESTIMATE_FORMAT as ESTIMATE_FORMAT
from .sides import read_side as read_side
from .sides import read_told as read_told
from .single_page import single_page as single_page
