package engine

import (
	"math"
	"strconv"

	"github.com/dpserve/dpserve/internal/app"
)

// Loopback is the address on which launched engines listen, unless their node shares the machine with other
// nodes.
const Loopback = "127.0.0.1"

// GroupKeyVar is the environment variable by which the simulated engines of one group know each other.
const GroupKeyVar = "DPSERVE_GROUP_KEY"

// KeepAliveS is the idle time in seconds for which launched engines keep connections. With the engines'
// default of 5 s the pool would send POSTs on sockets that the engine is closing. The idle times of dpserve's
// pools are shorter.
const KeepAliveS = 120

// simGOGC is the garbage collector's target of a simulated rank, fixed so that measurements do not depend on
// the caller's environment. It is low, because many ranks share a machine.
const simGOGC = 100

// simProfile renders the built-in engine: this program again, one rank per process.
func simProfile(s *Spec, environ []string) (Launch, error) {
	argv := Command(s.App)
	if len(argv) == 0 {
		argv = []string{s.Executable, "engine", "sim"}
	}
	port := s.Ports().HTTP(s.Index())
	argv = append(argv, "--host", s.host(), "--port", strconv.Itoa(port), "--served-model-name")
	argv = append(argv, s.App.Model.ServedNames()...)
	argv = append(argv, "--shutdown-timeout", shutdownTimeout(s.App), "--enable-prompt-tokens-details",
		"--sim-watch-stdin")
	argv = append(argv, lockstepFlags(s)...)
	events, err := eventFlags(s)
	if err != nil {
		return Launch{}, err
	}
	argv = append(argv, events...)
	transfer, err := transferOf(s)
	if err != nil {
		return Launch{}, err
	}
	argv = append(argv, transfer.flags...)
	flags, err := Flags(transfer.args)
	if err != nil {
		return Launch{}, err
	}
	own := []string{
		"GOMAXPROCS=1", "GOGC=" + strconv.Itoa(simGOGC), // many engines share one machine
		"VLLM_HTTP_TIMEOUT_KEEP_ALIVE=" + strconv.Itoa(KeepAliveS),
	}
	own = append(own, transfer.env...)
	if s.GroupKey != "" && s.App.DataParallel.Coupling == app.Lockstep {
		own = append(own, GroupKeyVar+"="+s.GroupKey)
	}
	return Launch{
		Argv: append(argv, flags...), Env: simEnvironment(environ, own, s.App.Engine.Env),
		URL: "http://" + s.hostPort(port), Addressing: app.AddressURL, Events: launchedEvents(s),
	}, nil
}

// shutdownTimeout is the whole grace time in seconds. dpserve drains the rank, and the node's timer enforces
// the rest of the time.
func shutdownTimeout(a *app.Application) string {
	return strconv.Itoa(int(math.Ceil(a.GracefulShutdownTimeout)))
}

// lockstepFlags are the data-parallel flags of a rank in a coupled group. An independent rank gets none,
// because a dense engine refuses to start with one.
func lockstepFlags(s *Spec) []string {
	if s.App.DataParallel.Coupling != app.Lockstep {
		return nil
	}
	return []string{
		"--data-parallel-size", strconv.Itoa(s.App.DataParallel.DPSize),
		"--data-parallel-rank", strconv.Itoa(s.Rank),
		"--data-parallel-size-local", "1",
		"--data-parallel-address", s.Rank0Addr,
		"--data-parallel-rpc-port", strconv.Itoa(s.Rank0Port),
	}
}
