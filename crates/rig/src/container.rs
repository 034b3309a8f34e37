//! A rig in a memory cgroup with a limit and without swap, as a container has it. All that the rig
//! starts is in there.

use super::cgroup::Cgroup;
use super::{Rig, RigError, Stage};
use undercroft_base::Bytes;

/// `inside`, in a container of this memory.
pub struct Container<'a> {
    /// Memory of the container.
    pub memory: Bytes,
    /// The rig that runs in it. Only rigs without a cgroup's limit of their own make sense.
    pub inside: &'a dyn Rig,
}

impl Rig for Container<'_> {
    fn name(&self) -> &'static str {
        self.inside.name()
    }

    fn stores_outside_limit(&self) -> bool {
        false
    }

    fn set_up(&self, limit: Bytes) -> Result<Stage, RigError> {
        let mut stage = self.inside.set_up(limit)?;
        stage.cgroup = Some(Cgroup::without_swap(self.memory)?);
        Ok(stage)
    }
}
