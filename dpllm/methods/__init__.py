"""Methods that release something privately, or measure a release, beside training: experimental.

Place in the flow: above the core, which imports nothing from here. Each method is a folder with its section of a
recipe, its words for report and card, its command and its events; `dpllm.registry` finds them by their entry
points. Their interfaces and files may change between versions without notice; their guarantees are held to the core's
rules.
"""
