package sim

import (
	"strings"

	em "github.com/dpserve/dpserve/enginemodel"
)

// settings is what the request checks and the answer writers know of the engine; it never changes.
type settings struct {
	names         []string
	maxModelLen   int
	seed          uint64
	blockSize     int
	fingerprint   string
	promptDetails bool
	forceUsage    bool
	hashing       em.Hashing
}

func (c *Config) settings() *settings {
	return &settings{
		names: c.Names, maxModelLen: c.Model.MaxModelLen, seed: c.Seed, blockSize: c.Model.BlockSize,
		fingerprint: c.fingerprint(), promptDetails: c.PromptTokensDetails, forceUsage: c.ForceIncludeUsage,
		hashing: c.Hashing,
	}
}

// knows checks the model a request names and settles how it is called in the answer.
func (s *settings) knows(p *plan) *apiError {
	if p.model == "" {
		p.model = s.names[0]
		return nil
	}
	return s.knowsModel(p.model)
}

func (s *settings) knowsModel(name string) *apiError {
	if name == "" {
		return nil
	}
	for _, n := range s.names {
		if n == name {
			return nil
		}
	}
	return &apiError{
		status: 404, kind: "NotFoundError", param: "model",
		message: "The model `" + name + "` does not exist. Valid aliases: " + strings.Join(s.names, ", ") +
			".",
	}
}
