"""Grid for Flower: runs Flower's strategies, ServerApps and ClientApps as they are, on devices of ours.

virtual_grid    VirtualGrid: in this process, in virtual time
virtual_device  when a device answers: its link, speed and hours
"""
