//! Faults of the views of a guest's memory: each comes by the userfaultfd of the process that has
//! the view, and is then a fault of the guest.

use std::collections::HashMap;

use rustix::event::epoll;
use undercroft_engine::Fault;
use undercroft_sys::uffd::{Message, MessageBuf};

use super::{FaultThread, ReadOnce, VIEWS};
use crate::gauges::scale::Short;
use crate::space::process::Process;
use crate::space::views::View;

impl FaultThread {
    /// Follows the views of guests: this thread polls those of the guests that it polls, one of
    /// each process. All views of a process have one userfaultfd.
    pub(super) fn follow_views(&mut self) {
        let (known, epoll) = (&self.known, &self.epoll);
        let mut now = HashMap::new();
        for guest in known.values() {
            let hosted = guest.hosted.as_ref();
            let mut views = hosted.map_or(Vec::new(), |hosted| hosted.guest.views());
            views.sort_by_key(|view| view.space);
            views.dedup_by_key(|view| view.space);
            let keyed = views.into_iter().map(|view| (VIEWS + view.number, view));
            now.extend(keyed.map(|(key, view)| (key, (guest.clone(), view))));
        }
        self.views.retain(|key, (_, view)| {
            let stays = now.remove(key).is_some();
            if !stays {
                let _ = epoll::delete(epoll, &**view);
            }
            stays
        });
        for (key, (guest, view)) in now {
            let data = epoll::EventData::new_u64(key);
            match epoll::add(epoll, &*view, data, epoll::EventFlags::IN) {
                Ok(()) => _ = self.views.insert(key, (guest, view)),
                Err(rustix::io::Errno::NOMEM | rustix::io::Errno::NOSPC) => {
                    self.shared.gauges.shortages.note(Short::Memory);
                    self.unpolled.push(guest);
                }
                Err(_) => {} // it is gone
            }
        }
    }

    /// Reads messages once, from a view of a guest's memory. It hears of faults only, and a write
    /// to a protected page is one like any other.
    pub(super) fn read_view(
        &mut self,
        process: &Process,
        view: &View,
    ) -> std::io::Result<ReadOnce> {
        let messages = view.events(self.inbox.next(process.space))?;
        let full = messages.len() == MessageBuf::MESSAGES;
        let hosted = process.hosted.as_ref();
        for message in messages {
            let Message::Fault {
                page,
                write,
                thread,
                ..
            } = message
            else {
                continue;
            };
            let at = hosted.and_then(|of| of.guest.page_at(view.space, page));
            self.faults.extend(at.map(|page| Fault {
                space: process.space,
                page,
                write,
                thread,
                urgent: false,
            }));
        }
        Ok(ReadOnce {
            full,
            events: false,
        })
    }
}
