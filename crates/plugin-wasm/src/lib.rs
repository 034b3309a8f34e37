//! A policy in a WebAssembly file: what is checked before a program starts, and how it is run.
//!
//! ABI 1. The file exports `memory` and two functions, and imports nothing but functions of the
//! module `undercroft` (docs/guide/policies.md has each):
//!
//! ```text
//! abi_version() -> i32                                                  it returns 1
//! on_event(kind: i32, space: i32, page: i64, pages: i64, detail: i64)
//! init()                                                                optional, called once
//! ```

use undercroft_base::{SpaceId, TierId, VirtPage};
use undercroft_plugin::{Event, Failure, Host, Kind, MODULE_BYTES_MAX, Policy, Tier, What, Wish};
use wasmi::errors::ErrorKind;
use wasmi::{
    Caller, Config, EnforcedLimits, Engine, Error, Extern, Linker, Module, Store, StoreLimits,
    StoreLimitsBuilder, TrapCode, TypedFunc,
};

/// The version of the interface that this binary has.
const ABI: i32 = 1;

/// Why a file is no policy. The text says what is wrong, and how it is mended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// More than [`MODULE_BYTES_MAX`].
    #[error("it has {0} bytes, more than {MODULE_BYTES_MAX}; strip it, and build it for size")]
    TooLarge(usize),
    /// Anything else.
    #[error("it is not a WebAssembly file in binary form; of the text form make one with wat2wasm")]
    NotWasm,
    /// The file begins like one.
    #[error("it is not valid WebAssembly: {0}")]
    Invalid(String),
    /// A function, memory, table or global of others.
    #[error(
        "it imports `{module}` `{name}`, which there is not; a policy may import functions of \
         `undercroft` only: {}", .known.join(", ")
    )]
    ForeignImport {
        /// The module.
        module: String,
        /// Its member.
        name: String,
        /// The functions that there are.
        known: &'static [&'static str],
    },
    /// There is no such export of that type.
    #[error("it does not export {0}")]
    NoExport(&'static str),
    /// Made for another version of the interface.
    #[error("it is for version {0} of the interface, and this undercroft has version 1")]
    OtherVersion(i32),
    /// The code fails at once, or wants more than it may have.
    #[error("it cannot be started: {0}")]
    NoStart(String),
}

/// The module of our functions.
const OURS: &str = "undercroft";

const FUNCTIONS: &[&str] = &[
    "reclaim",
    "reclaim_now",
    "prefetch",
    "scan",
    "gva_to_hva",
    "get_page_state",
    "hva_to_gva",
    "get_fault_ip",
    "get_fault_cr3",
    "get_memory_limit",
    "get_memory_usage",
    "get_pf_count",
    "get_waited_ms",
    "register_parameter",
    "get_parameter",
    "set_parameter",
    "place",
    "link_page",
    "move_pages",
    "get_tier_count",
    "get_tier",
];

/// Of these: a file that imports one hears where copies are.
const OF_TIERS: &[&str] = &["place", "move_pages", "get_tier_count", "get_tier"];

/// A file that imports one hears of instructions.
const OF_FAULTS: &[&str] = &["get_fault_ip", "get_fault_cr3"];

/// A file that imports one may ask about a guest.
const OF_GUESTS: &[&str] = &["gva_to_hva", "hva_to_gva"];

/// Linear memory of a plugin.
const MEMORY_BYTES_MAX: usize = 16 << 20;
/// Bytes of the name of a parameter.
const NAME_BYTES_MAX: usize = 64;
/// Calls within calls, and bytes of what they keep. The interpreter has a stack of its own for
/// them, so they take nothing of the thread's.
const CALLS_MAX: usize = 256;
const STACK_BYTES_MAX: usize = 256 << 10;
/// Elements of its table.
const TABLE_MAX: usize = 4096;

/// Fuel of an event: about as many instructions. Some milliseconds.
const FUEL_EVENT: u64 = 1_000_000;
/// Fuel of a tick, and of the end of a scan, which may go through all pages.
const FUEL_TICK: u64 = 50_000_000;
/// Fuel of the start: a program may wait for it.
const FUEL_START: u64 = 5_000_000;

struct State {
    host: Host,
    limits: StoreLimits,
}

type Hears = TypedFunc<(i32, i32, i64, i64, i64), ()>;

/// A WebAssembly policy that has started.
pub struct Plugin {
    store: Store<State>,
    on_event: Hears,
}

fn saturated(number: u64) -> i64 {
    number.min(i64::MAX as u64) as i64
}

/// The name at `at` of the plugin's memory. `None`: there is no name.
fn name(caller: &Caller<'_, State>, at: i32, bytes: i32) -> Option<String> {
    let Some(Extern::Memory(memory)) = caller.get_export("memory") else {
        return None;
    };
    let (at, bytes) = (at as u32 as usize, bytes as u32 as usize);
    let name = memory.data(caller).get(at..at.checked_add(bytes)?)?;
    let name = std::str::from_utf8(name).ok()?;
    let fits = (1..=NAME_BYTES_MAX).contains(&bytes);
    let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    (fits && name.chars().all(plain)).then(|| name.to_owned())
}

/// A wish of the policy's. 1: it is heard, 0: it is not.
fn asks(caller: &mut Caller<'_, State>, what: What, space: i32, page: i64) -> i32 {
    let wish = Wish {
        what,
        space: SpaceId(space as u32),
        page: VirtPage(page as u64),
    };
    i32::from(caller.data_mut().host.wish(wish))
}

/// Our functions. None can fail: a wrong argument has an answer, too.
fn linker(engine: &Engine, is_short: bool) -> Result<Linker<State>, Error> {
    let mut linker = Linker::<State>::new(engine);
    let wishes = [
        ("reclaim", What::Reclaim),
        ("reclaim_now", What::ReclaimNow),
        ("prefetch", What::Prefetch),
    ];
    for (name, what) in wishes {
        linker.func_wrap(
            OURS,
            name,
            move |mut caller: Caller<'_, State>, space: i32, page: i64| -> i32 {
                asks(&mut caller, what, space, page)
            },
        )?;
    }
    linker.func_wrap(
        OURS,
        "scan",
        |mut caller: Caller<'_, State>, interval_ms: i64| -> i32 {
            i32::from(caller.data_mut().host.scan(interval_ms as u64))
        },
    )?;
    linker.func_wrap(
        OURS,
        "get_page_state",
        |caller: Caller<'_, State>, space: i32, page: i64| -> i32 {
            caller.data().host.page(space as u32, page as u64) as i32
        },
    )?;
    linker.func_wrap(
        OURS,
        "get_memory_limit",
        |caller: Caller<'_, State>| -> i64 { saturated(caller.data().host.memory().limit) },
    )?;
    linker.func_wrap(
        OURS,
        "get_memory_usage",
        |caller: Caller<'_, State>| -> i64 { saturated(caller.data().host.memory().used) },
    )?;
    linker.func_wrap(OURS, "get_pf_count", |caller: Caller<'_, State>| -> i64 {
        saturated(caller.data().host.memory().faults)
    })?;
    linker.func_wrap(OURS, "get_waited_ms", |caller: Caller<'_, State>| -> i64 {
        saturated(caller.data().host.memory().waited_ms)
    })?;
    link_parameters(&mut linker)?;
    link_addresses(&mut linker, is_short)?;
    link_tiers(&mut linker)?;
    Ok(linker)
}

/// * `is_short`: the file is of the time when `gva_to_hva` had no table of a guest.
fn link_addresses(linker: &mut Linker<State>, is_short: bool) -> Result<(), Error> {
    linker.func_wrap(OURS, "get_fault_ip", |caller: Caller<'_, State>| -> i64 {
        caller.data().host.instruction() as i64
    })?;
    linker.func_wrap(OURS, "get_fault_cr3", |caller: Caller<'_, State>| -> i64 {
        caller.data().host.top_table() as i64
    })?;
    if is_short {
        linker.func_wrap(OURS, "gva_to_hva", |_space: i32, page: i64| -> i64 { page })?;
    } else {
        linker.func_wrap(
            OURS,
            "gva_to_hva",
            |mut caller: Caller<'_, State>, space: i32, cr3: i64, page: i64| -> i64 {
                let host = &mut caller.data_mut().host;
                known(host.gva_to_hva(space as u32, cr3 as u64, page as u64))
            },
        )?;
    }
    linker.func_wrap(
        OURS,
        "hva_to_gva",
        |mut caller: Caller<'_, State>, space: i32, cr3: i64, page: i64| -> i64 {
            let host = &mut caller.data_mut().host;
            known(host.hva_to_gva(space as u32, cr3 as u64, page as u64))
        },
    )?;
    Ok(())
}

/// A page, as a plugin hears it; -1: it is not known.
fn known(page: Option<u64>) -> i64 {
    page.and_then(|page| i64::try_from(page).ok()).unwrap_or(-1)
}

fn link_parameters(linker: &mut Linker<State>) -> Result<(), Error> {
    linker.func_wrap(
        OURS,
        "register_parameter",
        |mut caller: Caller<'_, State>, at: i32, bytes: i32, value: i64| -> i32 {
            let name = name(&caller, at, bytes);
            let host = &mut caller.data_mut().host;
            name.and_then(|name| host.register(&name, value))
                .map_or(-1, |at| at as i32)
        },
    )?;
    linker.func_wrap(
        OURS,
        "get_parameter",
        |caller: Caller<'_, State>, number: i32| -> i64 {
            let parameters = caller.data().host.parameters();
            parameters.get(number as usize).map_or(0, |of| of.value)
        },
    )?;
    linker.func_wrap(
        OURS,
        "set_parameter",
        |mut caller: Caller<'_, State>, number: i32, value: i64| -> i32 {
            i32::from(caller.data_mut().host.show(number as usize, value))
        },
    )?;
    Ok(())
}

/// The tier of a number of the plugin's. Of a number that no tier can have it is none of the run's.
fn tier(number: i32) -> TierId {
    TierId(u8::try_from(number).unwrap_or(u8::MAX))
}

/// A number of a tier, as a plugin asks for it; -1: there is no such tier, or no such number.
fn about(tier: Option<&Tier>, what: i32) -> i64 {
    match (tier, what) {
        (Some(tier), 0) => tier.latency as i64,
        (Some(tier), 1) => saturated(tier.capacity),
        (Some(tier), 2) => saturated(tier.free),
        (Some(tier), 3) => saturated(tier.load_ns),
        _ => -1,
    }
}

fn link_tiers(linker: &mut Linker<State>) -> Result<(), Error> {
    linker.func_wrap(
        OURS,
        "place",
        |mut caller: Caller<'_, State>, space: i32, page: i64, to: i32| -> i32 {
            asks(&mut caller, What::Place(tier(to)), space, page)
        },
    )?;
    linker.func_wrap(
        OURS,
        "link_page",
        |mut caller: Caller<'_, State>, space: i32, page: i64, next: i64| -> i32 {
            asks(&mut caller, What::Link(VirtPage(next as u64)), space, page)
        },
    )?;
    linker.func_wrap(
        OURS,
        "move_pages",
        |mut caller: Caller<'_, State>,
         space: i32,
         page: i64,
         pages: i32,
         from: i32,
         to: i32|
         -> i32 {
            let what = What::Move {
                pages: u64::from(pages as u32),
                from: tier(from),
                to: tier(to),
            };
            asks(&mut caller, what, space, page)
        },
    )?;
    linker.func_wrap(OURS, "get_tier_count", |caller: Caller<'_, State>| -> i32 {
        caller.data().host.tiers().len() as i32
    })?;
    linker.func_wrap(
        OURS,
        "get_tier",
        |caller: Caller<'_, State>, tier: i32, what: i32| -> i64 {
            about(caller.data().host.tiers().get(tier as usize), what)
        },
    )?;
    Ok(())
}

fn config() -> Config {
    let mut config = Config::default();
    config
        .consume_fuel(true)
        .ignore_custom_sections(true)
        .set_max_recursion_depth(CALLS_MAX)
        .set_max_stack_height(STACK_BYTES_MAX)
        .enforced_limits(EnforcedLimits::strict());
    config
}

fn why(error: &Error) -> Failure {
    if matches!(error.kind(), ErrorKind::TrapCode(TrapCode::OutOfFuel)) {
        Failure::Fuel
    } else {
        Failure::Trap(error.to_string())
    }
}

fn no_start(error: Error) -> Refusal {
    Refusal::NoStart(why(&error).to_string())
}

fn check_imports(module: &Module) -> Result<(), Refusal> {
    let foreign = (module.imports())
        .find(|import| import.module() != OURS || !FUNCTIONS.contains(&import.name()));
    foreign.map_or(Ok(()), |import| {
        Err(Refusal::ForeignImport {
            module: import.module().to_owned(),
            name: import.name().to_owned(),
            known: FUNCTIONS,
        })
    })
}

/// Whether the module imports `gva_to_hva` as it was before there were guests: without a table.
fn has_short(module: &Module) -> bool {
    module.imports().any(|import| {
        let arguments = import.ty().func().map(|of| of.params().len());
        import.name() == "gva_to_hva" && arguments == Some(2)
    })
}

impl Plugin {
    /// Reads a file's bytes, checks them, and starts the policy.
    /// * `host`: gets the parameters that it registers.
    ///
    /// Errors: [`Refusal`]; nothing of the file has run without a bound.
    pub fn read(bytes: &[u8], host: &mut Host) -> Result<Plugin, Refusal> {
        if bytes.len() > MODULE_BYTES_MAX {
            return Err(Refusal::TooLarge(bytes.len()));
        }
        if !bytes.starts_with(b"\0asm") {
            return Err(Refusal::NotWasm);
        }
        let engine = Engine::new(&config());
        let module = Module::new(&engine, bytes);
        let module = module.map_err(|error| Refusal::Invalid(error.to_string()))?;
        check_imports(&module)?;
        let limits = StoreLimitsBuilder::new()
            .memory_size(MEMORY_BYTES_MAX)
            .table_elements(TABLE_MAX)
            .instances(1)
            .memories(1)
            .tables(4)
            .build();
        let state = State {
            host: std::mem::take(host),
            limits,
        };
        let mut store = Store::new(&engine, state);
        store.limiter(|state| &mut state.limits);
        store.set_fuel(FUEL_START).map_err(no_start)?;
        let linker = linker(&engine, has_short(&module)).map_err(no_start)?;
        let instance = linker.instantiate_and_start(&mut store, &module);
        let instance = instance.map_err(no_start)?;
        if instance.get_memory(&store, "memory").is_none() {
            return Err(Refusal::NoExport("`memory`"));
        }
        let version = instance
            .get_typed_func::<(), i32>(&store, "abi_version")
            .map_err(|_| Refusal::NoExport("`abi_version() -> i32`"))?;
        let version = version.call(&mut store, ()).map_err(no_start)?;
        if version != ABI {
            return Err(Refusal::OtherVersion(version));
        }
        let on_event = instance
            .get_typed_func(&store, "on_event")
            .map_err(|_| Refusal::NoExport("`on_event(i32, i32, i64, i64, i64)`"))?;
        if instance.get_func(&store, "init").is_some() {
            let init = instance.get_typed_func::<(), ()>(&store, "init");
            let init = init.map_err(|_| Refusal::NoExport("`init` without arguments"))?;
            init.call(&mut store, ()).map_err(no_start)?;
        }
        std::mem::swap(&mut store.data_mut().host, host);
        let imports = |of: &[&str]| module.imports().any(|import| of.contains(&import.name()));
        if imports(OF_FAULTS) {
            host.ask_instructions();
        }
        if imports(OF_GUESTS) {
            host.ask_guest();
        }
        if imports(OF_TIERS) {
            host.ask_tiers();
        }
        Ok(Plugin { store, on_event })
    }
}

impl Policy for Plugin {
    fn hear(&mut self, event: &Event, host: &mut Host) -> Result<(), Failure> {
        let fuel = match event.kind {
            Kind::Tick | Kind::Scanned => FUEL_TICK,
            _ => FUEL_EVENT,
        };
        self.store.set_fuel(fuel).map_err(|error| why(&error))?;
        let arguments = (
            event.kind as i32,
            event.space.0 as i32,
            event.page as i64,
            event.pages as i64,
            event.detail as i64,
        );
        std::mem::swap(&mut self.store.data_mut().host, host);
        let heard = self.on_event.call(&mut self.store, arguments);
        std::mem::swap(&mut self.store.data_mut().host, host);
        heard.map_err(|error| why(&error))
    }
}

#[cfg(test)]
mod tests;
