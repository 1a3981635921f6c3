"""Grid for Flower: runs Flower's strategies, ServerApps and ClientApps as they are, on devices of ours.

virtual_grid    VirtualGrid: in this process, in virtual time
virtual_device  when a device answers: its link, speed and hours
tcp_grid        TcpGrid and serve_node: nodes in other processes, over authenticated connections
desk            letters for nodes that come and ask, each answered once
messages        Flower's messages outside of Flower
"""
