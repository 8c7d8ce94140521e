"""What `aedfl bench` measures. Every module has a function that measures and returns plain figures, and one that
puts them into a table; `stamp` says on which machine, when and by which command.
"""
