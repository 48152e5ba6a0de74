"""What the plug-ins for serving engines share. No engine is imported here.

pages.py      what a page holds
centers.py    a file's centers, cut for a tensor-parallel rank
settings.py   the settings that every engine takes, and how they are read
prompts.py    prompts and long chunks by FlashAttention
limits.py     what is refused in every engine
"""
