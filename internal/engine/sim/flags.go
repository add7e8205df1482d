package sim

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/enginemodel"
)

// ParseFlags turns the command line of an engine into a Config. It takes vLLM's spelling (--name value,
// --name=value, bare --name and --no-name, several values behind a list flag) and vLLM's names; flags of vLLM
// that a simulation cannot use are accepted and returned, so that a file written for real engines runs
// unchanged.
func ParseFlags(args []string) (Config, []string, error) {
	p := &flagParser{cfg: Default(), rpcHost: defaultHost, dpRank: -1}
	p.cfg.Port = defaultPort
	p.cfg.PromptTokensDetails = false
	var ignored []string
	for len(args) > 0 {
		var name string
		var values []string
		name, values, args = nextFlag(args)
		known, err := p.set(name, values)
		if err != nil {
			return Config{}, nil, err
		}
		if !known {
			ignored = append(ignored, name)
		}
	}
	if err := p.finish(); err != nil {
		return Config{}, nil, err
	}
	return p.cfg, ignored, nil
}

// nextFlag cuts one flag with its values off args.
func nextFlag(args []string) (name string, values, rest []string) {
	name, rest = args[0], args[1:]
	if !strings.HasPrefix(name, "--") {
		return name, nil, rest
	}
	if flag, value, ok := strings.Cut(name, "="); ok {
		return flag, []string{value}, rest
	}
	for len(rest) > 0 && !strings.HasPrefix(rest[0], "--") {
		values, rest = append(values, rest[0]), rest[1:]
	}
	return name, values, rest
}

type flagParser struct {
	ranked  []rankedFault
	cfg     Config
	rpcHost string
	rpcPort int
	dpRank  int // -1 = not given
	stepMS  *float64
	sha256  bool // sha256_cbor was asked for
	settled int  // block size after the load; 0 = as asked for
}

// set applies one flag; known is false for names this engine has no use for.
func (p *flagParser) set(name string, values []string) (known bool, err error) {
	if target := p.bools(strings.Replace(name, "--no-", "--", 1)); target != nil {
		*target = !strings.HasPrefix(name, "--no-")
		return true, nil
	}
	if target := p.ints(name); target != nil {
		return true, p.parse(name, values, func(s string) (err error) {
			*target, err = strconv.Atoi(s)
			return
		})
	}
	if target := p.texts(name); target != nil {
		return true, p.parse(name, values, func(s string) error { *target = s; return nil })
	}
	if apply := p.others(name); apply != nil {
		return true, p.parse(name, values, apply)
	}
	if name == "--served-model-name" {
		if len(values) == 0 {
			return true, errors.New("--served-model-name: want at least one name")
		}
		p.cfg.Names = values
		return true, nil
	}
	return false, nil
}

func (p *flagParser) parse(name string, values []string, apply func(string) error) error {
	if len(values) != 1 {
		return fmt.Errorf("%s: want one value, got %d", name, len(values))
	}
	if err := apply(values[0]); err != nil {
		return fmt.Errorf("%s: cannot use %q: %w", name, values[0], err)
	}
	return nil
}

func (p *flagParser) bools(name string) *bool {
	switch name {
	case "--enable-prompt-tokens-details":
		return &p.cfg.PromptTokensDetails
	case "--enable-force-include-usage":
		return &p.cfg.ForceIncludeUsage
	case "--enable-request-id-headers":
		return &p.cfg.RequestIDHeaders
	case "--enable-server-load-tracking":
		return &p.cfg.LoadTracking
	case "--enable-scale-out":
		return &p.cfg.ScaleOut
	case "--enable-expert-parallel", "-ep":
		return &p.cfg.ExpertParallel
	case "--sim-kv-sliding-window":
		return &p.cfg.KVEvents.SlidingWindow
	case "--enable-prefix-caching":
		return &p.cfg.Model.PrefixCaching
	}
	return nil
}

func (p *flagParser) ints(name string) *int {
	m := &p.cfg.Model
	switch name {
	case "--port":
		return &p.cfg.Port
	case "--max-num-seqs":
		return &m.MaxSeqs
	case "--max-model-len":
		return &m.MaxModelLen
	case "--block-size":
		return &m.BlockSize
	case "--num-gpu-blocks-override":
		return &m.Blocks
	case "--max-num-batched-tokens":
		return &m.MaxBatchedTokens
	case "--max-num-queued-reqs":
		return &m.MaxQueuedReqs
	case "--max-num-queued-tokens":
		return &m.MaxQueuedTokens
	case "--dp-sync-interval":
		return &p.cfg.SyncInterval
	case "--tensor-parallel-size":
		return &p.cfg.TensorParallel
	case "--data-parallel-size":
		return &p.cfg.DPSize
	case "--data-parallel-rank":
		return &p.dpRank
	case "--data-parallel-rpc-port":
		return &p.rpcPort
	case "--sim-internal-lb":
		return &p.cfg.InternalLB
	case "--sim-settle-block-size":
		return &p.settled
	}
	return nil
}

func (p *flagParser) texts(name string) *string {
	switch name {
	case "--host":
		return &p.cfg.Host
	case "--api-key":
		return &p.cfg.APIKey
	case "--model":
		return &p.cfg.Root
	case "--data-parallel-address":
		return &p.rpcHost
	}
	return nil
}

func (p *flagParser) others(name string) func(string) error {
	c := &p.cfg
	switch name {
	case "--seed":
		return func(s string) (err error) { c.Seed, err = strconv.ParseUint(s, 10, 64); return }
	case "--shutdown-timeout":
		return seconds(&c.ShutdownTimeout)
	case "--distributed-timeout-seconds":
		return seconds(&c.Model.CollectiveTimeout)
	case "--sim-startup-s":
		return seconds(&c.Startup)
	case "--sim-speed":
		return func(s string) (err error) { c.Model.Speed, err = strconv.ParseFloat(s, 64); return }
	case "--sim-step-ms":
		return func(s string) error {
			ms, err := strconv.ParseFloat(s, 64)
			p.stepMS = &ms
			return err
		}
	case "--sim-death":
		return func(s string) error {
			c.Model.NCCL = s == "nccl"
			if s != "nccl" && s != "gloo" {
				return errors.New("want gloo or nccl")
			}
			return nil
		}
	case "--sim-fail":
		return p.failOf
	case "--kv-events-config":
		return c.KVEvents.parse
	case "--prefix-caching-hash-algo":
		return func(s string) error { p.sha256 = s == "sha256_cbor"; return nil }
	case "--sim-kv-format":
		return func(s string) error { c.KVEvents.Format = KVFormat(s); return c.KVEvents.form() }
	case "--sim-kv-hash":
		return func(s string) error { c.KVEvents.Hash = KVHash(s); return c.KVEvents.form() }
	case "--sim-kv-first-seq":
		return func(s string) (err error) { c.KVEvents.FirstSeq, err = strconv.ParseUint(s, 10, 32); return }
	}
	return nil
}

func seconds(target *time.Duration) func(string) error {
	return func(s string) error {
		v, err := strconv.ParseFloat(s, 64)
		if err == nil && !(v >= 0 && v < 1e9) {
			err = errors.New("want seconds, 0 or more")
		}
		*target = time.Duration(v * float64(time.Second))
		return err
	}
}

// failOf takes a fault for every rank, or for one rank of a lockstep group: MODE%RANK. Ranks are compared
// when all flags are read.
func (p *flagParser) failOf(s string) error {
	if at := strings.LastIndexByte(s, '%'); at >= 0 {
		if rank, err := strconv.Atoi(s[at+1:]); err == nil {
			p.ranked = append(p.ranked, rankedFault{rank: rank, fault: s[:at]})
			return nil
		}
	}
	return p.fail(s)
}

// rankedFault is a --sim-fail that is meant for one rank of a group, which all get the same flags.
type rankedFault struct {
	rank  int
	fault string
}

// fail takes MODE[=ARG][@SECONDS]; the start modes have no time.
func (p *flagParser) fail(s string) error {
	spec, at, timed := strings.Cut(s, "@")
	mode, arg, _ := strings.Cut(spec, "=")
	switch mode {
	case "start-exit":
		p.cfg.StartExit = true
		return nil
	case "start-exit-once":
		p.cfg.StartExitOnce = arg
		if arg == "" {
			return errors.New("want start-exit-once=FILE")
		}
		return nil
	case "start-hang":
		p.cfg.StartHang = true
		return nil
	}
	entry := Scheduled{Fault: Fault{Mode: Mode(mode)}}
	if timed {
		if err := seconds(&entry.After)(at); err != nil {
			return err
		}
	}
	if err := entry.Fault.argument(arg); err != nil {
		return err
	}
	p.cfg.Schedule = append(p.cfg.Schedule, entry)
	return entry.Fault.validate()
}

// finish derives what several flags decide together.
func (p *flagParser) finish() error {
	c := &p.cfg
	if p.settled > 0 {
		c.ToldBlockSize, c.Model.BlockSize = c.Model.BlockSize, p.settled
	}
	for _, f := range p.ranked {
		if f.rank != p.dpRank {
			continue
		}
		if err := p.fail(f.fault); err != nil {
			return fmt.Errorf("--sim-fail: cannot use %q: %w", f.fault, err)
		}
	}
	if p.stepMS != nil {
		if !(*p.stepMS >= 0 && *p.stepMS < 1e9) {
			return fmt.Errorf("--sim-step-ms: cannot use %v: want milliseconds, 0 or more", *p.stepMS)
		}
		c.Model.Fixed, c.Model.FixedStep = true, time.Duration(*p.stepMS*float64(time.Millisecond))
	}
	switch {
	case p.dpRank >= 0:
		c.DPRank = p.dpRank
		c.RPCAddr = net.JoinHostPort(p.rpcHost, strconv.Itoa(p.rpcPort))
		if c.DPSize > 1 && p.rpcPort == 0 {
			c.RPCAddr = net.JoinHostPort(p.rpcHost, strconv.Itoa(defaultRPCPort))
		}
	case c.DPSize > 1: // a size without a rank is vLLM's internal load balancing
		c.InternalLB, c.DPSize = c.DPSize, 0
	}
	blocks := enginemodel.DefaultBlocks * enginemodel.DefaultBlockSize / max(1, c.Model.BlockSize)
	if c.Model.Blocks == enginemodel.DefaultBlocks {
		c.Model.Blocks = blocks // the memory stays, the blocks change their size
	}
	c.Model.Lockstep = c.lockstep()
	if p.sha256 {
		c.Hashing = enginemodel.Hashing{
			Algo: enginemodel.HashSHA256CBOR,
			Root: enginemodel.RootOf(defaultHashSeed),
		}
	}
	return c.Validate()
}

const defaultRPCPort = 29550

// defaultHashSeed stands for an unset PYTHONHASHSEED: since 0.32.0 hashes are the same everywhere then too.
const defaultHashSeed = ""
