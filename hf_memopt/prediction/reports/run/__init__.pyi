from .page_of_run import run_page as run_page
from .run_file import FORMAT as FORMAT
from .run_file import read_run as read_run
from .run_file import run_file_of as run_file_of
from .run_file import run_name as run_name
from .run_picture import RunPicture as RunPicture
