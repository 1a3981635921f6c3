"""Integrations: adapters that train inside other libraries' loops, each with an extra of its own and imported by name.

library_versions    refuses a library that is missing or older than what an adapter was tested with
lightning/          strategies of Lightning's Trainer and of Fabric
"""
