from .page_of_plan import plan_page as plan_page
from .plan_file import FORMAT as FORMAT
from .plan_file import read_plan_text as read_plan_text
from .plan_picture import draw_plan as draw_plan
