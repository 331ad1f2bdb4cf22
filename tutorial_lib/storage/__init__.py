"""The ground floor for what writes a file: whole or absent, hashed, read as data only."""

from .disk import Digest as Digest
from .disk import check_file as check_file
from .disk import digest_of as digest_of
from .disk import flush as flush
from .disk import hash_of as hash_of
from .disk import put_in_place as put_in_place
from .disk import read_json as read_json
from .disk import read_text as read_text
from .disk import replaced_by as replaced_by
from .disk import reserve as reserve
from .disk import sealed as sealed
from .disk import write_file as write_file
from .disk import write_text as write_text
