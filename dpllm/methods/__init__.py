"""Experimental methods that release something other than a trained model, or measure a release.

The core imports nothing from here. Each method is a folder with its words for report and card, its command and its
events; `dpllm.registry` reads ``catalogue.toml`` to find them. Interfaces and files may change between versions without
notice. The guarantees follow the rules of the core.
"""
