from .page import check_page as check_page
from .page import phase_name as phase_name
from .page import rendered as rendered
from .page import write_page as write_page
