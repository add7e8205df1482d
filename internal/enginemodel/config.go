package enginemodel

import (
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// Defaults of Config.
const (
	DefaultBlockSize        = 16
	DefaultBlocks           = 43712 // what an 80 GB device leaves the reference model at 16 tokens a block
	defaultMaxSeqs          = 256
	DefaultMaxModelLen      = 32768
	defaultMaxBatchedTokens = 8192
	DefaultSyncInterval     = 16 // steps between wave checks
)

// defaultCollectiveTimeout is NCCL's: how long a rank stays frozen beside a dead peer.
const defaultCollectiveTimeout = 600 * time.Second

// Config is the shape of one rank.
type Config struct {
	BlockSize        int  // tokens per block
	Blocks           int  // KV memory; at least one request of the model length must fit
	MaxSeqs          int  // requests that run at the same time
	MaxModelLen      int  // prompt + answer, tokens
	MaxBatchedTokens int  // tokens per step
	MaxQueuedReqs    int  // waiting requests before arrivals are rejected; 0 = no limit
	MaxQueuedTokens  int  // their prompt tokens; 0 = no limit
	PromptSteps      bool // a rank that has a prompt to compute does not decode in that step, as SGLang does
	PrefixCaching    bool // reuse blocks of equal prefixes
	BlockEvents      bool // EffectBlocks tells what enters and leaves the prefix cache

	// Transfer models what blocks hold, so that other engines can read them (Request.Lease, Request.Remote).
	Transfer  bool
	Lease     time.Duration // how long the blocks of an ended request wait for their reader
	Recompute bool          // compute a prompt whose blocks could not be loaded, instead of failing

	Law       steptime.Coefficients
	Speed     float64       // steps take the law's time / Speed
	Fixed     bool          // every step takes FixedStep instead
	FixedStep time.Duration // at any Speed

	Lockstep          bool // steps begin and end with the group (Group), idle ranks step too
	NCCL              bool // peers of a dead rank freeze until CollectiveTimeout instead of failing
	CollectiveTimeout time.Duration
}

// Default is the reference rank: uncoupled, at real speed.
func Default() Config {
	return Config{
		BlockSize: DefaultBlockSize, Blocks: DefaultBlocks, MaxSeqs: defaultMaxSeqs,
		MaxModelLen:      DefaultMaxModelLen,
		MaxBatchedTokens: defaultMaxBatchedTokens, PrefixCaching: true, Law: steptime.Reference(), Speed: 1,
		CollectiveTimeout: defaultCollectiveTimeout, Lease: DefaultLease,
	}
}

// Validate reports the first setting that cannot work.
func (c Config) Validate() error {
	switch {
	case c.BlockSize < 1 || c.Blocks < 1 || c.MaxSeqs < 1 || c.MaxModelLen < 1 || c.MaxBatchedTokens < 1:
		return fmt.Errorf("block size %d, blocks %d, max_num_seqs %d, max_model_len %d, "+
			"max_num_batched_tokens %d: all must be at least 1",
			c.BlockSize, c.Blocks, c.MaxSeqs, c.MaxModelLen, c.MaxBatchedTokens)
	case c.Blocks*c.BlockSize < c.MaxModelLen:
		return fmt.Errorf("%d blocks of %d tokens hold less than one request of max_model_len %d: raise "+
			"num_gpu_blocks_override or lower max_model_len",
			c.Blocks, c.BlockSize, c.MaxModelLen)
	case !(c.Speed > 0):
		return fmt.Errorf("speed is %v: it must be above 0", c.Speed)
	case c.FixedStep < 0:
		return fmt.Errorf("fixed step is %v: it must not be negative", c.FixedStep)
	case c.Transfer && c.Lease <= 0:
		return fmt.Errorf("kv_lease_duration is %v: it must be above 0", c.Lease)
	}
	return nil
}
