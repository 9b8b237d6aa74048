"Kernels that start at once: each notebook still has a process of its own, only the seconds of the imports are shared (see forks.py)."
import os

from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner

from forks import Forked

class Kernel(Forked): kind = 'kernel'

class Provisioner(LocalProvisioner):
    async def launch_kernel(self, cmd, **kwargs):
        env = {k: v for k,v in (kwargs.get('env') or os.environ).items() if k!='JPY_PARENT_PID'} # its parent is who forks
        self.process = Kernel(['-m', 'ipykernel_launcher', '-f', self.parent.connection_file], env=env, cwd=kwargs.get('cwd'))
        self.pid = self.pgid = self.process.pid
        return self.connection_info

class Manager(AsyncKernelManager):
    "For `NotebookClient(kernel_manager_class=)`: its kernel is a fork"
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.provisioner = Provisioner(kernel_id='fork', kernel_spec=self.kernel_spec, parent=self)
