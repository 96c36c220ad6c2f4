"""The lens: a web page for watching runs and inspecting every token, also available as a single file.

It only reads run folders.
"""
