from .groups import ChannelGroups
