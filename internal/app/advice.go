package app

import "fmt"

// whenToUseDP is the page that all advice points to.
const whenToUseDP = "docs/when-to-use-dp.md"

// fewOngoing is a number of requests per rank below which a lockstep group computes its experts for so few
// tokens that reading their weights takes most of a step.
const fewOngoing = 16

// Advise returns sentences about a pool whose ranks gain little from data parallelism. Nothing is wrong with
// its file. Of attached engines dpserve knows no arguments, and their ranks may come later.
func Advise(a *Application) (out []string) {
	if a.Engine.Kind == KindAttach {
		return nil
	}
	advise := func(format string, args ...any) {
		out = append(out, fmt.Sprintf(format, args...)+"; when to use DP: "+whenToUseDP)
	}
	if a.NumReplicas == 1 && a.Pool == "" {
		advise("its one rank has no other rank to share the load with; num_replicas adds ranks, and " +
			"tensor_parallel_size makes one rank faster")
		return out
	}
	if a.DataParallel.Coupling != Lockstep {
		return nil
	}
	// SGLang's lockstep is DP attention, which saves KV memory without expert parallelism too.
	if a.Engine.Kind != KindSGLang && !a.Engine.Args.isOn("enable-expert-parallel") {
		advise("its ranks wait for the slowest one in each step, and do not spread experts; write " +
			"coupling: independent for a dense model, engine.args.enable_expert_parallel: true for a " +
			"mixture of experts")
	}
	if n := a.MaxOngoingRequests; n > 0 && n < fewOngoing {
		advise("max_ongoing_requests: %d gives the experts of the group at most %d tokens per step; leave "+
			"it out, or write at least %d", n, n*a.DataParallel.DPSize, fewOngoing)
	}
	return out
}
