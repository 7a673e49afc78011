package kube

import (
	"context"
	"encoding/json"
	"fmt"
)

// ServerVersion is what the API server says that its version is: v1.37.1. Every account has the right to ask.
func ServerVersion(ctx context.Context, client Interface) (string, error) {
	body, err := client.RawCore().Get().AbsPath("/version").DoRaw(ctx)
	if err != nil {
		return "", fmt.Errorf("asking the API server for its version: %w", err)
	}
	var version struct {
		GitVersion string `json:"gitVersion"`
	}
	if err := json.Unmarshal(body, &version); err != nil {
		return "", fmt.Errorf("reading the version of the API server: %w", err)
	}
	return version.GitVersion, nil
}
