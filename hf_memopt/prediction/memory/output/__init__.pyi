from .estimate_picture import draw as draw
from .estimate_picture import timeline_data as timeline_data
from .estimate_text import as_dict as as_dict
from .estimate_text import plan_line as plan_line
from .estimate_text import print_estimate as print_estimate
