"""The address of remote calls, `import unisono.rpc as rpc`, which lie in `unisono_contrib.rpc`."""

from typing import TYPE_CHECKING

from unisono.spec.finder import door

if TYPE_CHECKING:
    from unisono_contrib.rpc import CallFuture as CallFuture
    from unisono_contrib.rpc import CallTimeout as CallTimeout
    from unisono_contrib.rpc import DistributedOptimizer as DistributedOptimizer
    from unisono_contrib.rpc import Expert as Expert
    from unisono_contrib.rpc import NoExperts as NoExperts
    from unisono_contrib.rpc import PeerLost as PeerLost
    from unisono_contrib.rpc import RemoteError as RemoteError
    from unisono_contrib.rpc import RRef as RRef
    from unisono_contrib.rpc import UnreliableExperts as UnreliableExperts
    from unisono_contrib.rpc import autograd as autograd
    from unisono_contrib.rpc import dist_autograd as dist_autograd
    from unisono_contrib.rpc import exported as exported
    from unisono_contrib.rpc import find as find
    from unisono_contrib.rpc import get_worker_info as get_worker_info
    from unisono_contrib.rpc import init as init
    from unisono_contrib.rpc import offer as offer
    from unisono_contrib.rpc import remote as remote
    from unisono_contrib.rpc import rpc_async as rpc_async
    from unisono_contrib.rpc import rpc_sync as rpc_sync
    from unisono_contrib.rpc import shutdown as shutdown
    from unisono_contrib.rpc import wait_all as wait_all

__getattr__ = door(__name__)
