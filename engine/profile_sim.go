package engine

import (
	"math"
	"strconv"

	"github.com/dpserve/dpserve/app"
)

// Loopback is where engines that dpserve launches listen, unless their node shares the machine with others.
const Loopback = "127.0.0.1"

// GroupKeyVar is the environment variable by which the simulated engines of one group know each other.
const GroupKeyVar = "DPSERVE_GROUP_KEY"

// KeepAliveS is the idle time in seconds that launched engines are told to keep connections (their own
// default of 5 meets the pool's POSTs on closing sockets). The pools of dpserve stay below it.
const KeepAliveS = 120

// simGOGC is the garbage collector's target of a simulated rank, written down so that a figure of ours does
// not depend on the caller's environment: small and steady beats fast, many ranks share a machine.
const simGOGC = 100

// simProfile renders the built-in engine: this program again, one rank per process.
func simProfile(s *Spec, environ []string) (Launch, error) {
	argv := s.App.Engine.Command
	if len(argv) == 0 {
		argv = []string{s.Executable, "engine", "sim"}
	}
	port := s.Ports().HTTP(s.Index())
	argv = append(argv[:len(argv):len(argv)], "--host", s.host(), "--port", strconv.Itoa(port),
		"--served-model-name")
	argv = append(argv, s.App.Model.ServedNames()...)
	argv = append(argv, "--shutdown-timeout", shutdownTimeout(s.App), "--enable-prompt-tokens-details",
		"--sim-watch-stdin")
	argv = append(argv, lockstepFlags(s)...)
	events, err := eventFlags(s)
	if err != nil {
		return Launch{}, err
	}
	argv = append(argv, events...)
	flags, err := Flags(s.App.Engine.Args)
	if err != nil {
		return Launch{}, err
	}
	own := []string{
		"GOMAXPROCS=1", "GOGC=" + strconv.Itoa(simGOGC), // many engines share one machine
		"VLLM_HTTP_TIMEOUT_KEEP_ALIVE=" + strconv.Itoa(KeepAliveS),
	}
	if s.GroupKey != "" && s.App.DataParallel.Coupling == app.Lockstep {
		own = append(own, GroupKeyVar+"="+s.GroupKey)
	}
	return Launch{
		Argv: append(argv, flags...), Env: Environment(environ, own, s.App.Engine.Env), URL: "http://" +
			s.hostPort(port), Events: launchedEvents(s),
	}, nil
}

// shutdownTimeout is the whole grace time in seconds: the drain is dpserve's, the node's timer enforces what
// is left of it.
func shutdownTimeout(a *app.Application) string {
	return strconv.Itoa(int(math.Ceil(a.GracefulShutdownTimeout)))
}

// lockstepFlags are the data-parallel flags of a rank in a coupled group. An independent rank gets none: a
// dense engine with one would refuse to start.
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
